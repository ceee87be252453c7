"""Engines: launch, quiesce, ask and accept them; the plugin inside their ranks. They never know a driver."""
