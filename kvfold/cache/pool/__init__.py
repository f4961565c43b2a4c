"""Folded pages in an engine's pool: what a page's bytes are, and what a step of the engine does to a layer.

An engine hands out blocks of its pool and says for each sequence which blocks hold it. A block has one or more pages;
tokens of an unfinished page lie dense in a slot of a side buffer, and the page is folded into the pool when it is full.
A sequence's first token lies dense in another (`firsts`).

A query at position t reads the pages before its own folded, but for the first token, and its own dense, even if that
page is full by now. So what it reads follows from the tokens before it alone: chunks, the batch and shared blocks
change nothing.
"""
