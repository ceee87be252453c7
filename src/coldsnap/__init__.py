"""Capture a warmed-up LLM inference engine and restore it in seconds, answering exactly as before."""
