"""Engines that use Maru; one package each."""
