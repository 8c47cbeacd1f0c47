"""Weight updates: the trainers' side that sends, and the engines' side that receives."""
