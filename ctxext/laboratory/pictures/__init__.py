"""What methods are, as numbers and as pictures. A file is one kind of picture, its numbers apart from its drawing."""
