"""What one step costs: pure functions from a step's shape to nanoseconds."""
