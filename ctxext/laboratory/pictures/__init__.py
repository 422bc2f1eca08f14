"""Methods as numbers and as pictures. A file is one kind of picture: how its numbers are computed and drawn."""
