"""The formats of other libraries: names of tensors, arguments of models, files of a folder."""
