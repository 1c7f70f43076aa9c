"""The hostile suite at random against one running system, with honest clients beside it: `make hostile`."""
