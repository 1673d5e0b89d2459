"""Sets of images: folders, lists, archives, tables, arrays, the hub, and generated textures."""
