"""How settings are declared, read, checked and shown; the settings of pretraining and `recipe=auto`."""
