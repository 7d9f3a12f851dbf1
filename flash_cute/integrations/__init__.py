"""Faces of flash_cute for libraries that choose their attention by name; each is imported only when used."""
