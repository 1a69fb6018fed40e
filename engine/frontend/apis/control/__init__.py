"""Control of a running worker: pause, weights, profiles, adapters, its role."""
