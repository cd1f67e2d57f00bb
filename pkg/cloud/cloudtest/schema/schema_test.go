// SPDX-License-Identifier: Apache-2.0

package schema

import (
	"net/url"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	a := Load("ec2")
	const answer = `<DescribeRouteTablesResponse><routeTableSet><item><routeSet><item><state>active</state></item><item><state>STATE</state></item></routeSet></item></routeTableSet></DescribeRouteTablesResponse>`
	for name, test := range map[string]struct{ form, answer, err string }{
		"right":             {"RouteTableId.1=rtb-1&MaxResults=100&DryRun=true", strings.ReplaceAll(answer, "STATE", "blackhole"), ""},
		"an unknown value":  {"", strings.ReplaceAll(answer, "STATE", "lost"), "routeSet[1].state: lost is not one of [active blackhole filtered]"},
		"an unknown member": {"Tables.1=rtb-1", "", `the description has no member "Tables"`},
		"a wrong type":      {"MaxResults=many", "", "MaxResults: many is not a number"},
		"no list":           {"RouteTableId.x=rtb-1", "", `a list has the member "x"`},
	} {
		form, _ := url.ParseQuery(test.form)
		err := a.Check("DescribeRouteTables", Form(form, "Action"), XML([]byte(test.answer)))
		if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
	}
	if err := a.Check("DeleteRoute", Form(url.Values{}), nil); err == nil || !strings.Contains(err.Error(), `"RouteTableId" is missing`) {
		t.Errorf("error %v, want one about the member that is missing", err)
	}
}
