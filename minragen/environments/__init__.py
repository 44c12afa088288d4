"""The ten environments, one file each, and the modules that some of them share."""
