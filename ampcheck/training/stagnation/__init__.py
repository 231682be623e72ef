"""Do updates change what they are added to?"""
