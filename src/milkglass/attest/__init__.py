"""Verifies offline what confidential hardware proves, and says what it does not prove."""
