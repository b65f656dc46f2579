"""Messages between actors, and the interfaces that they implement. Only msgspec and the standard library."""
