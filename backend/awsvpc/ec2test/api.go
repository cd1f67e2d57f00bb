// SPDX-License-Identifier: Apache-2.0

package ec2test

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// failure is the HTTP status and the code of an error.
type failure struct {
	status int
	code   string
}

// Errors of calls that vpctest does not have.
var (
	errFilter    = errors.New("the filter is invalid")
	errNoID      = errors.New("the instance ID does not exist")
	errNoReplace = errors.New("there is no route defined in the route table, use CreateRoute instead")
)

// failures returns the answer to a failed call, by the error of the call.
func failures() map[error]failure {
	return map[error]failure{
		vpctest.ErrAway:      {http.StatusServiceUnavailable, "Unavailable"},
		vpctest.ErrSignature: {http.StatusUnauthorized, "AuthFailure"},
		vpctest.ErrThrottled: {http.StatusServiceUnavailable, "RequestLimitExceeded"},
		vpctest.ErrDenied:    {http.StatusForbidden, "UnauthorizedOperation"},
		vpctest.ErrDryRun:    {http.StatusPreconditionFailed, "DryRunOperation"},
		vpctest.ErrUnknown:   {http.StatusBadRequest, "InvalidAction"},
		vpctest.ErrInvalid:   {http.StatusBadRequest, "InvalidParameterValue"},
		errFilter:            {http.StatusBadRequest, "InvalidParameterValue"},
		errNoReplace:         {http.StatusBadRequest, "InvalidParameterValue"},
		errNoID:              {http.StatusBadRequest, "InvalidInstanceID.NotFound"},
		vpctest.ErrNoTable:   {http.StatusBadRequest, "InvalidRouteTableID.NotFound"},
		vpctest.ErrNoTarget:  {http.StatusBadRequest, "InvalidNetworkInterfaceID.NotFound"},
		vpctest.ErrNoRoute:   {http.StatusBadRequest, "InvalidRoute.NotFound"},
		vpctest.ErrExists:    {http.StatusBadRequest, "RouteAlreadyExists"},
		vpctest.ErrQuota:     {http.StatusBadRequest, "RouteLimitExceeded"},
	}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	form, err := url.ParseQuery(string(body))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	call := vpctest.Call{Name: form.Get("Action"), DryRun: form.Get("DryRun") == "true"}
	answer, err := s.Answer(call, signed(r, body), func(v *vpctest.View) (any, error) { return s.answer(v, call, form) })
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	text, _ := xml.Marshal(answer) // a text that is cut does not fit
	if problem := s.api.Check(call.Name, schema.Form(form, "Action", "Version"), schema.XML(text)); problem != nil {
		err = problem
	}
	if err != nil {
		f := cmp.Or(failures()[err], failure{http.StatusBadRequest, "NotInTheDescription"})
		message := err.Error()
		if err == vpctest.ErrDenied { //nolint:errorlint // not wrapped
			message += " Encoded authorization failure message: " + strings.Repeat("x", 500)
		}
		w.WriteHeader(f.status)
		answer = errorAnswer{Errors: []errorItem{{f.code, message}}, RequestID: "test"}
	}
	_ = xml.NewEncoder(w).Encode(answer)
}

type errorAnswer struct {
	XMLName   xml.Name    `xml:"Response"`
	Errors    []errorItem `xml:"Errors>Error"`
	RequestID string      `xml:"RequestID"`
}

type errorItem struct {
	Code    string
	Message string
}

// answer returns the answer to a call. Like EC2, it does not look for the route in a dry run.
func (s *Server) answer(v *vpctest.View, call vpctest.Call, form url.Values) (any, error) {
	result := done{XMLName: xml.Name{Local: call.Name + "Response"}, Return: true}
	switch call.Name {
	case "DescribeInstances":
		return describeInstances(v, form)
	case "DescribeRouteTables":
		return s.describeTables(v, form)
	case "CreateRoute", "ReplaceRoute", "DeleteRoute":
		if call.DryRun {
			return nil, nil
		}
		return result, changeRoute(v, call.Name, form)
	case "ModifyNetworkInterfaceAttribute":
		return result, v.Restrict(form.Get("NetworkInterfaceId"), form.Get("SourceDestCheck.Value") != "false")
	}
	return nil, vpctest.ErrUnknown
}

// done is the answer to a call that changes something.
type done struct {
	XMLName xml.Name
	Return  bool `xml:"return"`
}

// signed signs the request again with the keys of the role, and reports in Valid whether the result
// is the same.
func signed(r *http.Request, body []byte) vpctest.Signed {
	at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	if err != nil {
		return vpctest.Signed{}
	}
	again, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+r.Host+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return vpctest.Signed{}
	}
	again.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	sum := sha256.Sum256(body)
	credentials := aws.Credentials{AccessKeyID: vpctest.KeyID, SecretAccessKey: vpctest.Secret, SessionToken: vpctest.Token}
	if err := v4.NewSigner().SignHTTP(r.Context(), credentials, again, hex.EncodeToString(sum[:]), "ec2", vpctest.Region, at); err != nil {
		return vpctest.Signed{}
	}
	return vpctest.Signed{Valid: again.Header.Get("Authorization") == r.Header.Get("Authorization"), Time: at}
}

// list returns the values of the numbered parameters name.1, name.2 and so on.
func list(form url.Values, name string) (values []string) {
	for i := 1; form.Has(name + "." + strconv.Itoa(i)); i++ {
		values = append(values, form.Get(name+"."+strconv.Itoa(i)))
	}
	return values
}

// filters returns the filters of a call, with the values by name.
func filters(form url.Values) map[string][]string {
	all := map[string][]string{}
	for i := 1; form.Has(fmt.Sprintf("Filter.%d.Name", i)); i++ {
		all[form.Get(fmt.Sprintf("Filter.%d.Name", i))] = list(form, fmt.Sprintf("Filter.%d.Value", i))
	}
	return all
}

type instanceAnswer struct {
	XMLName   xml.Name       `xml:"DescribeInstancesResponse"`
	Instances []instanceItem `xml:"reservationSet>item>instancesSet>item"`
	NextToken string         `xml:"nextToken,omitempty"`
}

type instanceItem struct {
	ID         string          `xml:"instanceId"`
	State      string          `xml:"instanceState>name"`
	Interfaces []interfaceItem `xml:"networkInterfaceSet>item"`
}

type interfaceItem struct {
	ID              string   `xml:"networkInterfaceId"`
	Subnet          string   `xml:"subnetId"`
	VPC             string   `xml:"vpcId"`
	SourceDestCheck bool     `xml:"sourceDestCheck"`
	IPv4            []string `xml:"privateIpAddressesSet>item>privateIpAddress"`
	IPv6            []string `xml:"ipv6AddressesSet>item>ipv6Address"`
}

func describeInstances(v *vpctest.View, form url.Values) (any, error) {
	ids := list(form, "InstanceId")
	chosen := filters(form)
	known := map[string]bool{}
	var all []instanceItem
	for _, i := range v.Instances() {
		known[i.ID] = true
		wanted := len(ids) == 0 || slices.Contains(ids, i.ID)
		for name, values := range chosen {
			ok, known := matchesInstance(i, name, values)
			if !known || len(values) > 200 {
				return nil, errFilter
			}
			wanted = wanted && ok
		}
		if wanted {
			all = append(all, item(i))
		}
	}
	if slices.ContainsFunc(ids, func(id string) bool { return !known[id] }) {
		return nil, errNoID
	}

	page, next, err := vpctest.Page(v, form.Get("NextToken"), form.Get("MaxResults"), all)
	return instanceAnswer{Instances: page, NextToken: next}, err
}

// matchesInstance reports whether an instance matches a filter, and whether the filter is known.
// Instances have no public addresses.
func matchesInstance(i vpctest.Instance, name string, values []string) (ok, known bool) {
	has := func(is4 bool) bool {
		return slices.ContainsFunc(i.Addresses, func(a netip.Addr) bool { return a.Is4() == is4 && slices.Contains(values, a.String()) })
	}

	switch name {
	case "vpc-id":
		return slices.Contains(values, vpctest.VPC), true
	case "network-interface.network-interface-id":
		return slices.Contains(values, Interface(i)), true
	case "network-interface.addresses.private-ip-address":
		return has(true), true
	case "network-interface.ipv6-addresses.ipv6-address":
		return has(false), true
	case "network-interface.addresses.association.public-ip":
		return false, true
	}
	return false, false
}

func item(i vpctest.Instance) instanceItem {
	n := interfaceItem{ID: Interface(i), Subnet: i.Subnet, VPC: vpctest.VPC, SourceDestCheck: i.Restricted}
	for _, a := range i.Addresses {
		if a.Is4() {
			n.IPv4 = append(n.IPv4, a.String())
		} else {
			n.IPv6 = append(n.IPv6, a.String())
		}
	}

	state := "running"
	if i.Stopped {
		state = "stopped"
	}
	return instanceItem{i.ID, state, []interfaceItem{n}}
}

type tableAnswer struct {
	XMLName   xml.Name    `xml:"DescribeRouteTablesResponse"`
	Tables    []tableItem `xml:"routeTableSet>item"`
	NextToken string      `xml:"nextToken,omitempty"`
}

type tableItem struct {
	ID           string            `xml:"routeTableId"`
	VPC          string            `xml:"vpcId"`
	Associations []associationItem `xml:"associationSet>item"`
	Routes       []routeItem       `xml:"routeSet>item"`
}

type associationItem struct {
	Subnet string `xml:"subnetId,omitempty"`
	Main   bool   `xml:"main"`
}

type routeItem struct {
	IPv4      string `xml:"destinationCidrBlock,omitempty"`
	IPv6      string `xml:"destinationIpv6CidrBlock,omitempty"`
	List      string `xml:"destinationPrefixListId,omitempty"`
	Interface string `xml:"networkInterfaceId,omitempty"`
	Instance  string `xml:"instanceId,omitempty"`
	Gateway   string `xml:"gatewayId,omitempty"`
	NAT       string `xml:"natGatewayId,omitempty"`
	Transit   string `xml:"transitGatewayId,omitempty"`
	Peering   string `xml:"vpcPeeringConnectionId,omitempty"`
	State     string `xml:"state"`
	Origin    string `xml:"origin"`
}

func (s *Server) describeTables(v *vpctest.View, form url.Values) (any, error) {
	ids := list(form, "RouteTableId")
	for _, id := range ids {
		if !slices.Contains(v.Tables(), id) {
			return nil, vpctest.ErrNoTable
		}
	}

	var all []tableItem
	for _, id := range v.Tables() {
		wanted := len(ids) == 0 || slices.Contains(ids, id)
		for name, values := range filters(form) {
			ok, known := s.matches(v, id, name, values)
			if !known {
				return nil, errFilter
			}
			wanted = wanted && ok
		}
		if !wanted {
			continue
		}

		routes, err := v.Visible(id)
		if err != nil {
			return nil, err
		}
		all = append(all, describe(v, id, routes))
	}

	page, next, err := vpctest.Page(v, form.Get("NextToken"), form.Get("MaxResults"), all)
	return tableAnswer{Tables: page, NextToken: next}, err
}

// matches reports whether a table matches a filter, and whether the filter is known.
func (s *Server) matches(v *vpctest.View, id, name string, values []string) (ok, known bool) {
	switch {
	case name == "vpc-id":
		return slices.Contains(values, vpctest.VPC), true
	case name == "association.main":
		return slices.Contains(values, strconv.FormatBool(id == vpctest.MainTable)), true
	case name == "association.subnet-id":
		subnet := v.SubnetOf(id)
		return subnet != "" && slices.Contains(values, subnet), true
	case strings.HasPrefix(name, "tag:"):
		return slices.Contains(values, s.tag(id, strings.TrimPrefix(name, "tag:"))), true
	}
	return false, false
}

// describe returns the description of a table. Each table also has a route to a VPC endpoint,
// whose destination is not a prefix.
func describe(v *vpctest.View, id string, routes []vpctest.Route) tableItem {
	table := tableItem{ID: id, VPC: vpctest.VPC, Routes: []routeItem{{List: "pl-1", Gateway: "vpce-1", State: "active", Origin: "CreateRoute"}}}
	if subnet := v.SubnetOf(id); subnet != "" || id == vpctest.MainTable {
		table.Associations = []associationItem{{Subnet: subnet, Main: id == vpctest.MainTable}}
	}

	for _, r := range routes {
		origin := map[vpctest.Kind]string{vpctest.System: "CreateRouteTable", vpctest.Custom: "CreateRoute", vpctest.Learned: "EnableVgwRoutePropagation"}[r.Kind]
		one := routeItem{State: "active", Origin: origin}
		if r.Dst.Addr().Is4() {
			one.IPv4 = r.Dst.String()
		} else {
			one.IPv6 = r.Dst.String()
		}

		kind, _, _ := strings.Cut(r.Target, "-")
		switch kind {
		case "eni":
			one.Interface = r.Target
		case "nat":
			one.NAT = r.Target
		case "tgw":
			one.Transit = r.Target
		case "pcx":
			one.Peering = r.Target
		default:
			one.Gateway = r.Target
		}
		if i, ok := owner(v, one.Interface); one.Interface != "" && (!ok || i.Stopped) {
			one.State = "blackhole"
		} else if ok {
			one.Instance = i.ID
		}
		table.Routes = append(table.Routes, one)
	}
	return table
}

// owner returns the instance with that network interface.
func owner(v *vpctest.View, networkInterface string) (i vpctest.Instance, ok bool) {
	for _, i := range v.Instances() {
		if Interface(i) == networkInterface {
			return i, true
		}
	}
	return vpctest.Instance{}, false
}

func changeRoute(v *vpctest.View, action string, form url.Values) error {
	table := form.Get("RouteTableId")
	target := form.Get("NetworkInterfaceId")
	dst, err := netip.ParsePrefix(form.Get("DestinationCidrBlock") + form.Get("DestinationIpv6CidrBlock"))
	if err != nil || dst != dst.Masked() || dst.Addr().Is4() != form.Has("DestinationCidrBlock") {
		return vpctest.ErrInvalid
	}
	to := func(r vpctest.Route) bool { return r.Dst == dst }
	switch action {
	case "CreateRoute":
		_, err = v.Create(table, dst, target, "")
	case "ReplaceRoute":
		err = v.Replace(table, target, "", to)
		if errors.Is(err, vpctest.ErrUnchanged) {
			return nil
		}
		if errors.Is(err, vpctest.ErrNoRoute) {
			return errNoReplace
		}
	default:
		err = v.Delete(table, to)
	}
	return err
}
