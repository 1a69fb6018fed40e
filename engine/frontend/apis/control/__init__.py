"""Control of a worker: pause, weights, profiles, adapters, role."""
