# jq -e -s -f gate.jq report.json
#
# True, and so exit status 0, only for one complete report in which every layer has 28 dB or more.
#
# Closed where in doubt. An undefined number is null in the report, and jq holds null to be less than any
# number but a string to be more: so an SNR must be a number first. A report without layers judges nothing.
# Of an empty file jq 1.6 would say 0 without -s, and of several reports it would tell the last one's: -s
# makes one list of what the file holds.

def good: (.snr_db | type) == "number" and .snr_db >= 28;

length == 1
and (.[0] |
  .schema == "quanterr.report"
  and .verdict == "pass"
  and .complete == true
  and (.layers | type) == "array"
  and (.layers | length) > 0
  and all(.layers[]; good))
