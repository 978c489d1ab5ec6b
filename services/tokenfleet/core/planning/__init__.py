"""Planning: how many replicas of which model each site should have in the next hour, and why."""
