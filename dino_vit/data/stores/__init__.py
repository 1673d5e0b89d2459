"""Where images are stored: files, byte ranges of archives, rows of tables, or whatever a function reads."""
