"""Published traces without text: block hashes (Mooncake, Bailian, Weka, Dynamo), or lengths only."""
