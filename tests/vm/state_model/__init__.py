"""A model of versioned state that copies everything, random programs for it, and the faults they are run under."""
