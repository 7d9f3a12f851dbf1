"""flash_cute under the names of other libraries, for code that was written for them."""
