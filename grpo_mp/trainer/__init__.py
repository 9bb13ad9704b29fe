"""What stands between the loop and the rooms: putting a run together, a step's batch, its metrics, its state."""
