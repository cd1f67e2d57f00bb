// SPDX-License-Identifier: Apache-2.0

// Package alitest is a server for tests. It speaks the part of Alibaba Cloud's API for routes and
// instances, and the protocol of the metadata service. It verifies the signature of each call.
package alitest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/access/acs3"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// Server is the cloud. It is an http.Handler for the calls of all services.
type Server struct {
	*vpctest.State
	api schema.API
}

// New returns a Server with a table and no instances.
func New() Server {
	state := vpctest.New(func(i vpctest.Instance) string { return i.ID }, "CreateRouteEntry", "ModifyRouteEntry", "DeleteRouteEntry")
	return Server{state, schema.Load("ali")}
}

// failure is the HTTP status and the code of an error.
type failure struct {
	status int
	code   string
}

// errMalformed is the error about the id of something that is not an instance.
var errMalformed = errors.New("the specified parameter InstanceIds is not valid")

// failures returns the answer to a failed call, by the error of the call.
func failures() map[error]failure {
	return map[error]failure{
		vpctest.ErrAway:      {http.StatusServiceUnavailable, "ServiceUnavailable"},
		vpctest.ErrSignature: {http.StatusBadRequest, "SignatureDoesNotMatch"},
		vpctest.ErrThrottled: {http.StatusBadRequest, "Throttling.User"},
		vpctest.ErrDenied:    {http.StatusForbidden, "Forbidden.RAM"},
		vpctest.ErrDryRun:    {http.StatusBadRequest, "DryRunOperation"},
		vpctest.ErrUnknown:   {http.StatusNotFound, "InvalidAction.NotFound"},
		vpctest.ErrInvalid:   {http.StatusBadRequest, "InvalidCidrBlock"},
		errMalformed:         {http.StatusBadRequest, "InvalidInstanceId.Malformed"},
		vpctest.ErrNoTable:   {http.StatusNotFound, "InvalidRouteTableId.NotFound"},
		vpctest.ErrNoTarget:  {http.StatusNotFound, "InvalidNextHopId.NotFound"},
		vpctest.ErrNoRoute:   {http.StatusBadRequest, "ResourceNotFound.RouteEntry"},
		vpctest.ErrExists:    {http.StatusBadRequest, "InvalidCIDRBlock.Duplicate"},
		vpctest.ErrUnchanged: {http.StatusBadRequest, "OperationDenied.NextHopNotChanged"},
		vpctest.ErrQuota:     {http.StatusBadRequest, "QuotaExceeded"},
	}
}

// ServeHTTP implements http.Handler.
func (s Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	params := r.URL.Query()
	name := r.Header.Get("X-Acs-Action")
	call := vpctest.Call{Name: name, DryRun: params.Get("DryRun") == "true"}
	answer, err := s.Answer(call, signed(r), func(v *vpctest.View) (any, error) { return answer(v, r.Header.Get("X-Acs-Version"), name, params) })
	w.Header().Set("Content-Type", "application/json;charset=utf-8")
	if problem := s.api.Check(name, schema.Form(params), schema.JSON(answer)); problem != nil {
		err = problem
	}
	if err != nil {
		f := cmp.Or(failures()[err], failure{http.StatusBadRequest, "InvalidParameter"})
		w.WriteHeader(f.status)
		answer = map[string]string{"Code": f.code, "Message": err.Error(), "RequestId": "test", "Recommend": "https://api.alibabacloud.com/troubleshoot"}
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// signed signs the request again with the keys of the role, and reports in Valid whether the result
// is the same.
func signed(r *http.Request) vpctest.Signed {
	at, err := time.Parse(time.RFC3339, r.Header.Get("X-Acs-Date"))
	if err != nil {
		return vpctest.Signed{}
	}
	again := &http.Request{Method: r.Method, Header: http.Header{}, URL: &url.URL{Host: r.Host, Path: r.URL.Path, RawQuery: r.URL.RawQuery}}
	nonce := r.Header.Get("X-Acs-Signature-Nonce")
	acs3.Sign(again, access.Keys{ID: vpctest.KeyID, Secret: vpctest.Secret, Token: vpctest.Token}, acs3.Call{
		Action: r.Header.Get("X-Acs-Action"), Version: r.Header.Get("X-Acs-Version"), Time: at, Nonce: nonce,
	})

	valid := r.Method == http.MethodPost && r.Header.Get("Accept") == "application/json" && r.URL.RawQuery == again.URL.RawQuery && nonce != ""
	for _, name := range []string{"Authorization", "X-Acs-Security-Token", "X-Acs-Content-Sha256"} {
		valid = valid && again.Header.Get(name) == r.Header.Get(name)
	}
	return vpctest.Signed{Valid: valid, Time: at, Nonce: nonce}
}

// object is an object of JSON.
type object = map[string]any

const (
	versionVPC = "2016-04-28"
	versionECS = "2014-05-26"
)

func answer(v *vpctest.View, version, name string, params url.Values) (any, error) {
	if params.Get("RegionId") != vpctest.Region {
		return nil, vpctest.ErrInvalid
	}

	table := params.Get("RouteTableId")
	target := params.Get("NextHopId")
	dst, err := netip.ParsePrefix(params.Get("DestinationCidrBlock"))
	to := func(r vpctest.Route) bool { return r.Dst == dst }
	writes := slices.Contains([]string{"CreateRouteEntry", "ModifyRouteEntry", "DeleteRouteEntry"}, name)
	switch {
	case writes && err != nil, version == versionECS != (name == "DescribeInstances"), version != versionECS && version != versionVPC:
		return nil, vpctest.ErrInvalid
	case name == "DescribeVSwitchAttributes":
		return object{"VSwitchId": params.Get("VSwitchId"), "VpcId": vpctest.VPC, "RouteTable": object{"RouteTableId": v.TableOf(params.Get("VSwitchId")), "RouteTableType": "System"}}, nil
	case name == "DescribeRouteEntryList":
		return entries(v, params)
	case name == "DescribeInstances":
		return instances(v, params)
	case name == "CreateRouteEntry":
		if params.Get("NextHopType") != "Instance" {
			return nil, vpctest.ErrInvalid
		}
		made, err := v.Create(table, dst, target, params.Get("Description"))
		return object{"RouteEntryId": entryID(made)}, err

	case name == "ModifyRouteEntry":
		if params.Get("NewNextHopType") != "Instance" {
			return nil, vpctest.ErrInvalid
		}
		return object{}, v.Replace(table, params.Get("NewNextHopId"), params.Get("Description"), to)
	case name == "DeleteRouteEntry":
		return object{}, v.Delete(table, func(r vpctest.Route) bool { return to(r) && r.Target == target })
	}
	return nil, vpctest.ErrUnknown
}

func entryID(r vpctest.Route) string { return fmt.Sprintf("rte-%d", r.Number) }

// entries returns the routes of a table. It adds a route whose destination is the id of a list of
// prefixes.
func entries(v *vpctest.View, params url.Values) (any, error) {
	table := params.Get("RouteTableId")
	routes, err := v.Visible(table)
	if err != nil {
		return nil, err
	}
	all := []object{{"RouteTableId": table, "RouteEntryId": "rte-0", "DestinationCidrBlock": "pl-1", "Type": "Custom", "Status": "Available", "NextHops": object{"NextHop": []object{{"NextHopType": "NatGateway", "NextHopId": "ngw-1"}}}}}
	for _, r := range routes {
		hops := []object{}
		for _, target := range append([]string{r.Target}, r.More...) {
			hops = append(hops, object{"NextHopType": hopType(target), "NextHopId": target, "Enabled": 1})
		}

		kind := map[vpctest.Kind]string{vpctest.System: "System", vpctest.Custom: "Custom", vpctest.Learned: "BGP"}[r.Kind]
		if r.Kind == vpctest.System {
			hops = []object{{"NextHopType": "local", "NextHopId": ""}}
		}

		origin := map[vpctest.Kind]string{vpctest.System: "SystemCreate", vpctest.Custom: "CustomCreate", vpctest.Learned: "RoutePropagation"}[r.Kind]
		all = append(all, object{
			"RouteTableId": table, "RouteEntryId": entryID(r), "DestinationCidrBlock": r.Dst.String(), "Type": kind, "Origin": origin, "Status": map[bool]string{true: "Pending", false: "Available"}[v.Pending(r)],
			"NextHops": object{"NextHop": hops}, "ServiceType": r.Service, "Description": r.Description,
		})
	}
	page, next, err := vpctest.Page(v, params.Get("NextToken"), params.Get("MaxResult"), all)
	return object{"RouteEntrys": object{"RouteEntry": page}, "NextToken": next}, err
}

func isInstance(id string) bool { return strings.HasPrefix(id, "i-") }

func hopType(target string) string {
	if isInstance(target) {
		return "Instance"
	}
	return "VpnGateway"
}

func instances(v *vpctest.View, params url.Values) (any, error) {
	var ids []string
	if params.Has("VpcId") {
		return describeAll(v, params, func(vpctest.Instance) bool { return params.Get("VpcId") == vpctest.VPC })
	}
	if err := json.Unmarshal([]byte(params.Get("InstanceIds")), &ids); err != nil || len(ids) == 0 || len(ids) > 100 {
		return nil, errors.New("the specified InstanceIds are not valid")
	}
	if slices.ContainsFunc(ids, func(id string) bool { return !isInstance(id) }) {
		return nil, errMalformed
	}
	return describeAll(v, params, func(i vpctest.Instance) bool { return slices.Contains(ids, i.ID) })
}

// describeAll describes a page of the instances for which wanted returns true.
func describeAll(v *vpctest.View, params url.Values, wanted func(vpctest.Instance) bool) (any, error) {
	all := []object{}
	for _, i := range v.Instances() {
		if wanted(i) {
			all = append(all, describe(i))
		}
	}
	page, next, err := vpctest.Page(v, params.Get("NextToken"), params.Get("MaxResults"), all)
	return object{"Instances": object{"Instance": page}, "NextToken": next}, err
}

func describe(i vpctest.Instance) object {
	private := []object{}
	six := []object{}
	for _, a := range i.Addresses {
		if a.Is4() {
			private = append(private, object{"PrivateIpAddress": a.String(), "Primary": true})
		} else {
			six = append(six, object{"Ipv6Address": a.String()})
		}
	}

	status := "Running"
	if i.Stopped {
		status = "Stopped"
	}
	return object{
		"InstanceId": i.ID, "Status": status,
		"VpcAttributes":   object{"VpcId": vpctest.VPC, "VSwitchId": i.Subnet, "PrivateIpAddress": object{"IpAddress": []string{i.IPv4().String()}}},
		"PublicIpAddress": object{"IpAddress": []string{}}, "EipAddress": object{"IpAddress": ""},
		"NetworkInterfaces": object{"NetworkInterface": []object{{"Type": "Primary", "PrivateIpSets": object{"PrivateIpSet": private}, "Ipv6Sets": object{"Ipv6Set": six}}}},
	}
}
