"""Questions asked once, with the programs that answered them."""
