"""What the backbones on Ray (verl, trinity) share: Ray itself, the child that trains, rows and their credit."""
