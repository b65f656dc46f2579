"""Settings of what the library computes, as frozen structs with bounds."""
