"""Adapters for frameworks that wrap, clip or save in ways of their own."""
