"""Storage backends that come with Maru, registered through the hooks that a vendor would use."""
