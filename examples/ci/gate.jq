# jq -e -s -f gate.jq report.json
#
# True, and so exit status 0, only for one complete report in which every layer has 28 dB or more.
#
# It fails closed. An undefined number is null in the report, and jq orders null below any number and strings
# above, so an SNR must be a number first. A report without layers fails. Without -s, jq 1.6 would exit with 0
# for an empty file, and with the status of the last for several reports: -s reads the whole file into one list.

def good: (.snr_db | type) == "number" and .snr_db >= 28;

length == 1
and (.[0] |
  .schema == "quanterr.report"
  and .verdict == "pass"
  and .complete == true
  and (.layers | type) == "array"
  and (.layers | length) > 0
  and all(.layers[]; good))
