"""How merestone-tiny is made: data, training, export and evaluation. No part of the package."""
