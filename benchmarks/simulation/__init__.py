"""A discrete-event simulation of many sessions; the routing and the admission in it are the product's own."""
