"""Maru's core: plugin host, protocol, metadata server and client. No torch, no engine."""
