"""Maru's core: plugin host, protocol, metadata server and client. No torch, no engine."""

__version__ = "0.1.0"
