"""`quartet doctor`: describes this machine, the stages' paths on it, and what keeps them from starting."""
