"""What measurements share: servers, clients, arms, models, texts, tables. Imports none of them."""
