"""Write backbones for other libraries, and say how they open what was written."""
