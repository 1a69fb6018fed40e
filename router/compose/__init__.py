"""The composer: builds a router process. Only it imports the features' modules."""
