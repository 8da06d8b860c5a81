"""What rests outside the device's memory while it is not needed."""
