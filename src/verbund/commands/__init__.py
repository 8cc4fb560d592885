"""Groups of commands, and the options that commands share."""
