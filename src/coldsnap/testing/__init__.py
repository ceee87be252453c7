"""Public aids for tests: a small real engine, fault injection, and fakes."""
