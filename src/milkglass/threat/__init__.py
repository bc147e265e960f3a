"""The game: what a defence, an observation, knowledge, an attack and a guess are, and the truth that grades it."""
