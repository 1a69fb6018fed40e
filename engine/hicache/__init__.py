"""Files of the hierarchical cache: their format, the folder, and the threads that read and write them."""
