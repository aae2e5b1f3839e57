"""Device hints for DAX memory, to be written exactly as a vendor outside of this tree would. No plugin yet."""
