"""What a stage keeps, which weights it sees, how it updates: the parts that methods are composed of."""
