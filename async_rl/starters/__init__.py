"""The examples that `async-rl init` writes into a folder of the user."""
