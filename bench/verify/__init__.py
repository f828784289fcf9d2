"""Do restored prefixes answer as if they had never left the GPU?"""
