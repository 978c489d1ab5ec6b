"""Sites: one origin's requests on the engines of several datacenters."""
