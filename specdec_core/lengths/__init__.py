"""Policies for the speculation length."""
