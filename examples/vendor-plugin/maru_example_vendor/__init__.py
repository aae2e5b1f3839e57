"""Pools in files of a marked folder, and figures of their reads: an example of a vendor's plugin for Maru."""
