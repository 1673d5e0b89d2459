"""The records of a run, what they say about it, and the page that shows them."""
