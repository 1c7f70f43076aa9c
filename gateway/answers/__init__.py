"""Requests and their answers, without HTTP and in no dialect."""
